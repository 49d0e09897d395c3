"""Runs scripts and plugin files that were written for vLLM.

Installing this package changes nothing: a package `vllm` exists only in processes that
`pegboard vllm-compat SCRIPT.py` starts, and in those that run one of the plugins of this package.
"""
