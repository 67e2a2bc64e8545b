"""A device that is apart from the host in all that torch can see, on a machine that has none.

`install` makes it known to torch as `hpu`. Operators compute what the CPU computes, bit for bit, on
memory of its own: counted, limited on request, NaN where nothing was written yet. Copies between it
and the host are kept in a ledger. Only processes that install it see it, and none that has a device
of another kind can.
"""
