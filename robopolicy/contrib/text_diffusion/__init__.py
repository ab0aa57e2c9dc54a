"""Text policies by masked diffusion, and the recipes that are made for them."""
