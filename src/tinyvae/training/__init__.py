"""Training. ``loop`` is the loop, ``task`` what a step computes, ``engine`` how processes work together, ``checkpoint``
and ``resume`` what survives, ``guards`` what may go wrong, ``validation`` how good it is, ``logs`` what is written
down, ``start`` puts all of it together from a configuration."""
