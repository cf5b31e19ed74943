"""The networks. ``variants`` holds the family table and the frame rule, ``blocks`` the layers, ``taehv`` the
networks built of them, ``codec`` what a network does with a whole video, ``streaming`` videos that arrive in pieces,
``weights`` the file formats. The fast forms are in `tinyvae.engines`."""
