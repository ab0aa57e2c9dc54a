"""Behaviour trees and Python programs as policies, and their search by a language model."""
