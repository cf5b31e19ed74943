"""The losses of training. Each is a scalar in fp32 with a weight of its own in the configuration.

``distances``: reconstruction, decoder, encoder and temporal loss; ``perceptual``: LPIPS; ``seraena``: the adversarial
correction, and when it starts.
"""
