"""Behavior trees and Python programs as policies, and their search with a language model."""
