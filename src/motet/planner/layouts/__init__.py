"""Layouts: degrees of parallelism, groups of devices, and cuts of modules into stages."""
