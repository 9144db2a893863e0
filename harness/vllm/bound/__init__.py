"""Classes derived from vLLM's own. Importing them needs vLLM 0.33.

Every name of vLLM is imported through upstream.py, so that contract_0_33.json lists all that we
rely on.
"""
