"""Planning of a run: does it fit hardware that is not here, and how fast is it?"""
