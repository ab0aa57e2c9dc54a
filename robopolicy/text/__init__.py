"""Language models, causal or masked diffusion, as policies whose tokens are decisions; loaded when they are used."""
