"""`make conformance`: Kubernetes' end-to-end suite against HPK on the sandbox."""
