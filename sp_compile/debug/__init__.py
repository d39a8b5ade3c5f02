"""What happened and why: dumps of every pass, accounts of calls, text."""
