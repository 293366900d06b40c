//! Opening windows, and believing what a transport says of them.

use std::sync::Arc;

use ep_transport::{
    Deadline, Group, Link, ProcessTransport, Reach, ThreadTransport, Transport, TransportError,
    WindowSpec,
};

use crate::Result;
use crate::lane::mapped;
use crate::node::Nodes;
use crate::window::Window;

/// What a transport says of its windows is checked before it becomes an address. `promised` is what
/// it said of nodes beforehand.
pub(crate) fn check_link(
    group: &Group,
    link: &dyn Link,
    window: &Window,
    (staging, on_gpu): (bool, bool),
    promised: Option<&Nodes>,
    deadline: Deadline,
) -> Result<Nodes> {
    let mut reached = Vec::with_capacity(group.world());
    let mut problem = None;
    for peer in 0..group.world() {
        let mapping =
            if peer == group.rank() { Some(link.window()) } else { mapped(link.reach(peer)) };
        reached.push(u8::from(mapping.is_some()));
        match mapping {
            Some(m) if m.bytes < window.bytes || !m.base.as_ptr().cast::<u128>().is_aligned() => {
                let (got, need) = (m.bytes, window.bytes);
                problem = Some(format!(
                    "the window of rank {peer} is {got} bytes of {need}, or not aligned"
                ));
            }
            None if !staging => {
                problem = Some(format!("rank {peer} is not mapped, against maps_all_peers()"));
            }
            None if !on_gpu && matches!(link.reach(peer), Reach::Paired) => {
                problem = Some(format!("rank {peer} only exchanges, which is for rows on GPUs"));
            }
            _ => {}
        }
    }
    // One more byte says whether this rank is content, so that all ranks fail together.
    reached.push(u8::from(problem.is_none()));
    let all = group.all_gather_within("build", &reached, deadline)?;
    let world = group.world();
    let maps = |a: usize, b: usize| all[a].get(b) == Some(&1);
    let pairs = (0..world).flat_map(|a| (0..a).map(move |b| (a, b)));
    let one_sided = pairs.into_iter().find(|&(a, b)| maps(a, b) != maps(b, a));
    let unhappy = || (0..world).find(|&r| all[r].get(world) != Some(&1));
    let nodes = match (problem, one_sided) {
        (Some(problem), _) => Err(problem),
        (None, Some((a, b))) => Err(format!("of ranks {b} and {a} only one maps the other")),
        (None, None) => match unhappy() {
            Some(rank) => Err(format!("rank {rank} cannot use its windows")),
            None => Nodes::from_reach(world, maps),
        },
    };
    let nodes = nodes.and_then(|nodes| match promised {
        Some(promised) if *promised != nodes => {
            Err("ranks map others than those of Transport::nodes()".into())
        }
        _ => Ok(nodes),
    });
    nodes.map_err(|detail| TransportError::Unsupported { op: "build", detail }.into())
}

/// Shares memory between threads where all ranks are threads of one process, else between
/// processes.
pub(crate) fn open_host(
    group: &Group,
    spec: WindowSpec,
    deadline: Deadline,
) -> Result<Arc<dyn Link>> {
    match ThreadTransport::new().open(group, spec, deadline) {
        Err(TransportError::Unsupported { .. }) => {
            Ok(ProcessTransport::new().open(group, spec, deadline)?)
        }
        opened => Ok(opened?),
    }
}
