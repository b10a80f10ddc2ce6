"""DAPO training core, based on torch, transformers, Ray and vLLM. Independent of Prefect."""
