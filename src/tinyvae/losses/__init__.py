"""The losses of training. Each is a scalar in fp32 with a weight of its own in the configuration."""
