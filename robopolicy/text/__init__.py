"""Language models as policies whose decisions are tokens; imported on first use."""
