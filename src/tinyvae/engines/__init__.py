"""The fast forms of the networks. ``fold`` folds the weights, ``stack`` is the one loop over folded layers; ``eager``,
``onednn``, ``cudnn`` and ``hopper`` say how an engine computes a layer; ``fused`` chooses the engine and is the users'
codec.
"""
