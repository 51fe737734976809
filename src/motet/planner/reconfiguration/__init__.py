"""The next plan after nodes were lost or joined, and the copies that it needs."""
