"""The training core of DAPO: knows torch, transformers, Ray and vLLM, and nothing of Prefect."""
