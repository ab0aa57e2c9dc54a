"""Parts of text methods on a robot task."""
