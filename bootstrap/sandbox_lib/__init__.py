"""A real Slurm cluster on one machine: every node is a set of Linux namespaces.

Runs as root on the host with nothing but Python's standard library. The nodes share one
Debian root file system (each with its own writable layer in memory) and one /home.
"""
