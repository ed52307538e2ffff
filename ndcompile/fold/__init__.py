"""Runs of equal blocks in a graph: two rounds are kept, and the second stands for all later ones.

Capture marks where blocks begin and end (`borders`). A run is a stretch of the graph that repeats: in every round the
same blocks and the same ops between them, each taking the same values from outside, what its own round made, or what
the round before made, and only the last round's results are seen outside. So any two neighbouring rounds say all that
there is to say of a run, whatever its length: `fold` keeps the first two, `unfold` gives the whole graph again.
"""

from ndcompile.fold.items import NotFollowed, frozen
from ndcompile.fold.place import Place, in_run, inside, pins_in, repeat_of
from ndcompile.fold.rounds import fold
from ndcompile.fold.unfold import unfold

__all__ = ["NotFollowed", "Place", "fold", "frozen", "in_run", "inside", "pins_in", "repeat_of", "unfold"]
