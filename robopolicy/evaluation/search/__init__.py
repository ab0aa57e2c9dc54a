"""Weights of composed policies by experiment: methods with a stated budget, a record to resume from, a fair trial."""

from robopolicy.evaluation.search.evaluators import Evaluator, SimEvaluator
from robopolicy.evaluation.search.ledger import Ledger
from robopolicy.evaluation.search.methods import Plan, SearchMethod
from robopolicy.evaluation.search.simplex import Weights
from robopolicy.evaluation.search.weights import (
    SEARCHES,
    Candidate,
    WeightSearch,
    against,
    check_disjoint,
    hold_out,
    make_search,
    score,
    search_weights,
)

__all__ = [
    "SEARCHES",
    "Candidate",
    "Evaluator",
    "Ledger",
    "Plan",
    "SearchMethod",
    "SimEvaluator",
    "WeightSearch",
    "Weights",
    "against",
    "check_disjoint",
    "hold_out",
    "make_search",
    "score",
    "search_weights",
]
