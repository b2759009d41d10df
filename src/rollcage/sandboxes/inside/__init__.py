"""The keeper's side of the local sandbox: standard library only, started as a process of its own.

It is the one place that forks and that joins a box's namespaces. It runs with no site-packages and under another
package name, so its modules import nothing of rollcage and each other only relatively.
"""
