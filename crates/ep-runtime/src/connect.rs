//! Opening windows, and believing what a transport says of them.

use std::sync::Arc;

use ep_transport::{
    Deadline, Group, Link, ProcessTransport, ThreadTransport, Transport, TransportError, WindowSpec,
};

use crate::Result;
use crate::lane::mapped;
use crate::shape::Window;

/// What a transport says of its windows is checked before it becomes an address.
pub(crate) fn check_link(
    group: &Group,
    link: &dyn Link,
    window: &Window,
    (staging, on_gpu): (bool, bool),
    deadline: Deadline,
) -> Result<()> {
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
            None if on_gpu => {
                problem = Some(format!(
                    "rank {peer} is not mapped; on GPUs all ranks have to be, so far"
                ));
            }
            None if !staging => {
                problem = Some(format!("rank {peer} is not mapped, against maps_all_peers()"));
            }
            _ => {}
        }
    }
    // One more byte says whether this rank is content, so that all ranks fail together.
    reached.push(u8::from(problem.is_none()));
    let all = group.all_gather_within("build", &reached, deadline)?;
    let detail = problem.or_else(|| {
        let world = group.world();
        let one_sided = |(a, b): (usize, usize)| all[a].get(b) != all[b].get(a);
        let pairs = (0..world).flat_map(|a| (0..a).map(move |b| (a, b)));
        let pair = pairs.into_iter().find(|&p| one_sided(p));
        let unhappy = (0..world).find(|&r| all[r].get(world) != Some(&1));
        pair.map(|(a, b)| format!("of ranks {b} and {a} only one maps the other"))
            .or(unhappy.map(|r| format!("rank {r} cannot use its windows")))
    });
    match detail {
        Some(detail) => Err(TransportError::Unsupported { op: "build", detail }.into()),
        None => Ok(()),
    }
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
