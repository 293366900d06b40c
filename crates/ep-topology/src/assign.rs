//! Least-cost assignment.

/// Assigns every row a column of its own so that the sum of `cost(row, column)` is least.
///
/// Needs `rows ≤ columns`. Hungarian method with potentials (Kuhn 1955, Munkres 1957), in
/// O(rows² · columns). The result is the column of each row; of equal sums always the same one.
pub(crate) fn assign(
    rows: usize,
    columns: usize,
    cost: impl Fn(usize, usize) -> i64,
) -> Vec<usize> {
    debug_assert!(rows <= columns);
    // Row and column 0 are the algorithm's sentinel; `owner[c]` is the row that holds column c.
    let mut row_price = vec![0i64; rows + 1];
    let mut column_price = vec![0i64; columns + 1];
    let mut owner = vec![0usize; columns + 1];
    for row in 1..=rows {
        let mut previous = vec![0usize; columns + 1];
        let mut slack = vec![i64::MAX; columns + 1];
        let mut visited = vec![false; columns + 1];
        let mut column = 0;
        owner[0] = row;
        loop {
            visited[column] = true;
            let from = owner[column];
            let (mut step, mut next) = (i64::MAX, 0);
            for c in (1..=columns).filter(|c| !visited[*c]) {
                let reduced = cost(from - 1, c - 1) - row_price[from] - column_price[c];
                if reduced < slack[c] {
                    (slack[c], previous[c]) = (reduced, column);
                }
                if slack[c] < step {
                    (step, next) = (slack[c], c);
                }
            }
            for c in 0..=columns {
                if visited[c] {
                    row_price[owner[c]] += step;
                    column_price[c] -= step;
                } else if c > 0 {
                    slack[c] -= step;
                }
            }
            column = next;
            if owner[column] == 0 {
                break;
            }
        }
        while column != 0 {
            owner[column] = owner[previous[column]];
            column = previous[column];
        }
    }
    let mut result = vec![0; rows];
    for (column, &row) in owner.iter().enumerate().skip(1).filter(|(_, row)| **row > 0) {
        result[row - 1] = column - 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::assign;

    /// The least sum, by trying everything.
    fn least(costs: &[Vec<i64>], row: usize, used: &mut Vec<bool>) -> i64 {
        if row == costs.len() {
            return 0;
        }
        let mut best = i64::MAX;
        for column in 0..used.len() {
            if !used[column] {
                used[column] = true;
                best = best.min(costs[row][column] + least(costs, row + 1, used));
                used[column] = false;
            }
        }
        best
    }

    proptest! {
        #[test]
        fn no_assignment_is_cheaper(
            rows in 0usize..6, extra in 0usize..2,
            numbers in prop::collection::vec(0i64..50, 42),
        ) {
            let columns = rows + extra;
            let costs: Vec<Vec<i64>> = (0..rows)
                .map(|r| (0..columns).map(|c| numbers[r * 7 + c]).collect())
                .collect();
            let result = assign(rows, columns, |r, c| costs[r][c]);
            let mut seen = result.clone();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), rows);
            let sum: i64 = result.iter().enumerate().map(|(r, c)| costs[r][*c]).sum();
            prop_assert_eq!(sum, least(&costs, 0, &mut vec![false; columns]));
        }
    }
}
