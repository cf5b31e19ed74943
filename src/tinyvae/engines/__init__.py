"""The fast forms of the networks. ``fold`` folds the weights, ``fill`` fills up channels, ``stack`` is the one loop
over folded layers; ``eager``, ``onednn``, ``cudnn`` and ``hopper`` say how an engine computes a layer; ``fused``
chooses the engine and is the users' codec. ``replay`` runs small chunks from CUDA graphs, ``nvrtc`` compiles and
launches our own kernels, and each other file holds one or two of these kernels as functions on tensors.
"""
