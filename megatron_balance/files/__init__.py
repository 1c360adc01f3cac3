"""Files: what others wrote is read with bounds, and our output appears only when complete.

reading    bounded reads of text, JSON and YAML; links; digests of files
writing    output that appears only when complete; failures that name the path and the system's reason
"""
