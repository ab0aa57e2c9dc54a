"""Views of episodes: in a browser in 3D, and as files for Foxglove and Rerun."""
