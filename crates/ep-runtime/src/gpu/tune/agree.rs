//! What the ranks of a group agree on before they search: pure functions of what each of them says, so
//! that all come to the same.

use std::time::Duration;

use ep_transport::{Deadline, Group};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::gpu::Moving;
use crate::sched::tune::{Sample, StoredPlan};

/// The other ranks. Whatever is said is said by all of them, in the same order.
pub(crate) trait Peers {
    /// What all ranks say, by rank.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// Those of a group, who are waited for so long.
#[derive(Debug)]
pub(crate) struct GroupPeers<'a>(pub &'a Group, pub Duration);

impl Peers for GroupPeers<'_> {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.0.all_gather_within("build, tuning", bytes, Deadline::after(self.1))?)
    }
}

/// Exchanges values. One that cannot be read is `None`: an opinion of nothing.
pub(super) fn exchange<T: Serialize + DeserializeOwned>(
    peers: &dyn Peers,
    mine: &T,
) -> Result<Vec<Option<T>>> {
    // What cannot be written is an opinion of nothing too.
    let mine = serde_json::to_vec(mine).unwrap_or_default();
    let all = peers.gather(&mine)?;
    Ok(all.iter().map(|bytes| serde_json::from_slice(bytes).ok()).collect())
}

/// Whether all ranks say yes.
pub(super) fn all_agree(peers: &dyn Peers, yes: bool) -> Result<bool> {
    Ok(exchange(peers, &yes)?.iter().all(|said| *said == Some(true)))
}

/// The slowest rank's numbers, if all have some.
pub(super) fn slowest(peers: &dyn Peers, mine: Option<Sample>) -> Result<Option<Sample>> {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let mine = mine.map(|sample| (nanos(sample.time), nanos(sample.spent)));
    let all: Option<Vec<(u64, u64)>> =
        exchange(peers, &mine)?.into_iter().map(Option::flatten).collect();
    let most = |part: fn(&(u64, u64)) -> u64, all: &[(u64, u64)]| {
        Duration::from_nanos(all.iter().map(part).max().unwrap_or(0))
    };
    Ok(all.map(|all| Sample { time: most(|s| s.0, &all), spent: most(|s| s.1, &all) }))
}

/// What a rank wants of one kernel's plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Want {
    /// Whether tuning may choose: the layer has such a kernel, and the caller gave no plan.
    pub open: bool,
    /// What this rank's cache has.
    pub cached: Option<StoredPlan>,
}

/// What a rank wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Wish {
    /// The GPU's UUID.
    pub device: String,
    /// How long a search may take, where one is asked for.
    pub search: Option<Duration>,
    /// By [`Moving`].
    pub wants: [Want; 4],
}

/// What is done.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decision {
    /// By [`Moving`]: what some rank's cache has. Taken where it can be launched.
    pub cached: [Option<StoredPlan>; 4],
    /// By [`Moving`]: what is searched for.
    pub search: [bool; 4],
    /// How long the search may take.
    pub limit: Duration,
    /// Why nothing is searched for, although all ask for it.
    pub refused: Option<&'static str>,
}

pub(super) const SHARED_GPU: &str =
    "several ranks are on one GPU, whose times would be of all of them";

/// The plan of the lowest rank that has one counts; what no rank has is searched for if all want that,
/// for as long as the least patient of them.
pub(super) fn decide(wishes: &[Option<Wish>]) -> Decision {
    let known = || wishes.iter().flatten();
    let cached = Moving::ALL.map(|m| known().find_map(|wish| wish.wants[m as usize].cached));
    let limits: Option<Vec<Duration>> =
        wishes.iter().map(|wish| wish.as_ref().and_then(|wish| wish.search)).collect();
    let limit = limits.iter().flatten().min().copied();
    let open = |m: Moving| known().all(|wish| wish.wants[m as usize].open);
    let missing = |m: Moving| limit.is_some() && cached[m as usize].is_none() && open(m);
    let mut search = Moving::ALL.map(missing);
    let mut devices: Vec<&str> = known().map(|wish| wish.device.as_str()).collect();
    devices.sort_unstable();
    let shared = devices.windows(2).any(|pair| pair[0] == pair[1]);
    let refused = (shared && search.contains(&true)).then_some(SHARED_GPU);
    if refused.is_some() {
        search = [false; 4];
    }
    Decision { cached, search, limit: limit.unwrap_or_default(), refused }
}

#[cfg(test)]
mod tests {
    use ep_kernels::cuda::moe::{CopyPath, MovePlan};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn plan(warps: u32) -> Option<StoredPlan> {
        StoredPlan::new(&MovePlan::new(16, warps, CopyPath::LdSt { unroll: 4 }))
    }

    fn wish(device: &str, search: Option<Duration>) -> Wish {
        let want = Want { open: true, cached: None };
        Wish { device: device.into(), search, wants: [want; 4] }
    }

    fn decided(wishes: &[Wish]) -> Decision {
        decide(&wishes.iter().cloned().map(Some).collect::<Vec<_>>())
    }

    #[test]
    fn a_search_needs_all_ranks_and_lasts_as_long_as_the_least_patient_wants() {
        let (a, b) = (wish("a", Some(3 * SECOND)), wish("b", Some(2 * SECOND)));
        let both = decided(&[a.clone(), b.clone()]);
        assert_eq!((both.search, both.limit, both.refused), ([true; 4], 2 * SECOND, None));
        let one = decided(&[a.clone(), wish("b", None)]);
        assert_eq!((one.search, one.refused), ([false; 4], None));
        // A rank that could not be understood wants nothing.
        assert_eq!(decide(&[Some(a.clone()), None]).search, [false; 4]);
        let mut given = b;
        given.wants[Moving::Combine as usize].open = false;
        assert_eq!(decided(&[a, given]).search, [true, true, true, false]);
    }

    #[test]
    fn the_lowest_rank_that_knows_a_plan_decides() {
        let (mut a, mut b) = (wish("a", Some(SECOND)), wish("b", Some(SECOND)));
        b.wants[0].cached = plan(8);
        let one = decided(&[a.clone(), b.clone()]);
        assert_eq!((one.cached[0], one.search), (plan(8), [false, true, true, true]));
        a.wants[0].cached = plan(4);
        assert_eq!(decided(&[a, b]).cached, [plan(4), None, None, None]);
    }

    #[test]
    fn ranks_on_one_gpu_do_not_search() {
        let two = decided(&[wish("a", Some(SECOND)), wish("a", Some(SECOND))]);
        assert_eq!((two.search, two.refused), ([false; 4], Some(SHARED_GPU)));
        assert_eq!(decided(&[wish("a", None), wish("a", None)]).refused, None);
    }
}
