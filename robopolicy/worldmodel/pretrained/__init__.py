"""Video transformers and autoencoders of diffusers as world models that are told actions."""
