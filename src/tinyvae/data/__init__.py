"""From video files to exact, restartable batches: index -> clip choice -> decode -> augment -> loader."""
