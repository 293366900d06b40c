//! Workloads, verification, measurement and reports for ep-runtime.
