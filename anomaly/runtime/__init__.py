"""The machine: devices, threads, work side by side, memory given back."""
