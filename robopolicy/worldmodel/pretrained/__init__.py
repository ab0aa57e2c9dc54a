"""Action-conditioned world models from video transformers and autoencoders of diffusers."""
