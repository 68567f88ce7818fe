"""The figures of the project, and the runs they are drawn from: ``make figures``, docs/figures.md.

plan      which runs there are, and which figures they are for
store     a folder for each finished run, found again by a hash of its settings and of the code
runs      real processes over DDS
tables    the results of the runs as CSV files: all that is drawn comes from these
federated, parallel    the drawing, with canvas and the published marks
index     a page that names the data and the command of each figure, and copies for the documents

``run_accuracy`` is apart from these: the figure that each run leaves in its directory.
"""
