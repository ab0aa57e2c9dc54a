"""Success detectors for predicted videos: trained networks and vision-language models."""
