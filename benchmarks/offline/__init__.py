"""Offline learning from data of mixed quality."""
