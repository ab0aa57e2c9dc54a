"""Two-way adapters to other libraries."""
