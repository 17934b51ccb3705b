"""What `import qerl_jax` offers: policies, runs, and the jobs of the command line as functions.

May import everything but `cli`; only the package's root and `cli` import it.
"""
