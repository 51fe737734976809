"""Attention masks in a form that stays small for long sequences, and the kernels that compute under them.

segments --layout--> TokenLayout --rules--> IntervalMask --blocks--> TileCounts --distribution--> Distribution
"""
