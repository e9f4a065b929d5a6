"""The machine: devices, threads, passes side by side, memory given back; work on many machines.

`actors` and `dispatch` are about many machines: processes on Ray, any of which may die.
"""
