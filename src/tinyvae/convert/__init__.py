"""A trained model at work: videos to latents and back, and how fast that is here."""
