"""Success over network calls of generative heads."""
