"""`polymix.search` and `polymix search`: which layers get which mixer, within a budget of time.

run         the function, and its checks
stages      times, damages, training near the front, damages again, the knapsack, the comparison
candidates  every mixer for every layer, each in an adapter of its own
samples     what is learnt from, what is scored on, and what is compared on
damage      how far a model's output is from the original's
timing      the time of each layer with each candidate
knapsack    the best plan within a budget, exactly, and the fixed rules that it is compared with
content     what results.json holds
answer      the result, as text and JSON
page, plots  report.html and its picture
command     the command, which loads the model and the data
"""

from polymix.workflows.search.answer import Search
from polymix.workflows.search.run import MIXERS, search

__all__ = ["MIXERS", "Search", "search"]
