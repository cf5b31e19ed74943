"""Training. ``trainer`` is the loop, ``task`` what a step computes, ``engine`` how processes work together,
``checkpoint`` and ``resume`` what survives, ``guards`` what may go wrong, ``validation`` how good it is,
``run_log`` what is written down, ``start`` how all of it is put together from a configuration."""
