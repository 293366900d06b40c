//! Free SMs chosen to hurt most.

use ep_topology::SmMap;

/// The device's SMs in an order of which every beginning hosts as few clusters of `cluster` blocks as any set
/// of its size, by the argument of [`ep_topology::margin`]: first what each domain can have free without
/// hosting one, then whole clusters, then what remains of domains.
///
/// `round` varies which SMs of a domain come first: 0 one of each neighbouring pair (neighbours share a
/// texture-processing cluster), 1 ascending, others at random.
pub fn order(map: &SmMap, cluster: u32, round: u32) -> Vec<u32> {
    let cluster = cluster.max(1) as usize;
    let capacity = map.capacity(cluster as u32);
    let mut order = Vec::new();
    let mut steps: Vec<Vec<u32>> = Vec::new();
    for (domain, &hosts) in map.domains().iter().zip(&capacity.per_domain) {
        let sms = arrange(&domain.sms, round);
        let hidden = if hosts == 0 { sms.len() } else { sms.len().min(cluster - 1) };
        order.extend(&sms[..hidden]);
        steps.extend(sms[hidden..].chunks(cluster).map(<[u32]>::to_vec));
    }
    // Stable: a domain's whole clusters stay before what remains of it.
    steps.sort_by_key(|step| std::cmp::Reverse(step.len()));
    order.extend(steps.into_iter().flatten());
    order
}

fn arrange(sms: &[u32], round: u32) -> Vec<u32> {
    let mut sms = sms.to_vec();
    match round {
        0 => sms.sort_by_key(|sm| (sm % 2, *sm)),
        1 => sms.sort_unstable(),
        _ => sms.sort_by_key(|sm| scatter(*sm, round)),
    }
    sms
}

/// Any fixed function that mixes well: multiplications by odd constants, as in SplitMix64 (Steele, Lea,
/// Flood, 2014).
fn scatter(sm: u32, round: u32) -> u64 {
    let mut x = (u64::from(round) << 32 | u64::from(sm)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
