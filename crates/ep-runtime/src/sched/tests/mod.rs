//! The scheduler against a simulated device.

mod leases;
mod order;
mod policies;
mod sim;
