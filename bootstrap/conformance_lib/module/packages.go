//go:build tools

// Package conformance pins what `make conformance` builds of Kubernetes' own tests.
package conformance

import _ "k8s.io/kubernetes/test/e2e"
