"""Orders of visits (pick lists, inspection tours): exact for few, by a network for many."""

from robopolicy.contrib.ordering.exact import nearest_orders, path_length, shortest_orders
from robopolicy.contrib.ordering.network import VisitConfig, VisitPolicy, load_visits, save_visits
from robopolicy.contrib.ordering.visits import optimal_steps, order_visits, train_visits

__all__ = [
    "VisitConfig",
    "VisitPolicy",
    "load_visits",
    "nearest_orders",
    "optimal_steps",
    "order_visits",
    "path_length",
    "save_visits",
    "shortest_orders",
    "train_visits",
]
