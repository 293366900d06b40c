//! What a layer is built with that concerns nodes.

use super::{Hierarchy, Nodes, Rails};
use crate::ep::EpBuilder;
use crate::shape::Resolved;
use crate::{Place, Result};

impl EpBuilder {
    /// How tokens get to ranks of other nodes. Nodes are the classes of ranks whose windows are mapped
    /// by each other.
    pub fn hierarchy(mut self, hierarchy: Hierarchy) -> Self {
        self.hierarchy = hierarchy;
        self
    }

    /// The shape for `world` ranks, sized for what crosses nodes.
    pub(crate) fn resolve(&self, world: usize) -> Result<Resolved> {
        let rails = match self.hierarchy {
            Hierarchy::Flat => None,
            Hierarchy::Node => Some(match (self.nodes(world), &self.transport) {
                (Some(nodes), _) => nodes.rails(),
                (None, Some(_)) => Rails::any(world),
                // All ranks are on this host.
                (None, None) => Rails { nodes: 1, sources: 0 },
            }),
        };
        let mut resolved = self.shape.resolve(world, (self.slots, self.lanes), rails)?;
        if self.place == Place::Host {
            // Hosts learn all sizes as they go.
            resolved.blocks = None;
        }
        Ok(resolved)
    }

    /// The nodes of `world` ranks, as far as the transport knows them beforehand.
    pub(crate) fn nodes(&self, world: usize) -> Option<Nodes> {
        Some(Nodes::new(&self.transport.as_ref()?.nodes(world)?))
    }
}
