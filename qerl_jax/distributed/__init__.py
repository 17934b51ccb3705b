"""Several devices and hosts: their processes, meshes, shardings and messages.

May import `config` and `system`.
"""
