"""Which tokens see one another, in a form that stays small however long the sequence is, and who computes what of it.

segments --layout--> TokenLayout --rules--> IntervalMask --blocks--> TileCounts --distribution--> Distribution
                          '----bitfield--> words ---lower---^
"""
