"""What derives from vLLM's own classes: importing it without vLLM 0.33 is refused by name.

Every name of vLLM comes through upstream.py, so that contract_0_33.json says all that we rely on.
"""
