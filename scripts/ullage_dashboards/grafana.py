"""Renders dashboards as the JSON that Grafana loads, with Grafana's own SDK models."""

import json
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries, xychart
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.xychart import ScatterShow, SeriesMapping

from ullage_dashboards.model import Dashboard, Panel, Query, Variable

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="$datasource")
WIDTH = 24
HEIGHT = 8
STAT_HEIGHT = 4
COLOURS = ("green", "yellow", "orange", "red")
REF_IDS = "ABCDEFGHIJ"


def render(page: Dashboard) -> str:
    """Return a dashboard's JSON."""
    builder = (
        builders.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["ullage"])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(links())
        .with_variable(builders.DatasourceVariable("datasource").label("Source").type("prometheus"))
    )

    for each in page.variables:
        builder.with_variable(variable(each))

    number = 0
    y = 0
    for row in page.rows:
        number += 1
        builder.with_row(builders.Row(row.title).id(number).grid_pos(place(0, y, WIDTH, 1)))

        x = 0
        y = y + 1
        height = 0

        for panel in row.panels:
            number += 1
            if x + panel.width > WIDTH:
                x = 0
                y = y + height
                height = 0
            tall = STAT_HEIGHT if panel.kind == "stat" else HEIGHT
            position = place(x, y, panel.width, tall)
            builder.with_panel(picture(panel).id(number).grid_pos(position))
            x = x + panel.width
            height = max(height, tall)

        y += height

    built = builder.build()
    for each in built.templating.list_val or ():
        # The SDK sets these for every kind, but Grafana knows them for intervals alone.
        each.auto = each.auto_min = each.auto_count = None
    return json.dumps(built, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def place(x: int, y: int, width: int, height: int) -> dashboard.GridPos:
    return dashboard.GridPos(h=height, w=width, x=x, y=y)


def links() -> builders.DashboardLink:
    """Return a dropdown link to all of Ullage's other dashboards."""
    link = builders.DashboardLink("Ullage").type(dashboard.DashboardLinkType.DASHBOARDS)
    return link.tags(["ullage"]).as_dropdown(True).include_vars(True).keep_time(True)


def variable(each: Variable) -> builders.QueryVariable:
    """Return a dashboard variable over label values, with all values selected at first."""
    everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return (
        builders.QueryVariable(each.name)
        .label(each.label)
        .query({"query": each.query, "refId": each.name})
        .datasource(SOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def picture(panel: Panel) -> Any:
    """Return Grafana's builder for a panel."""
    builder: Any
    if panel.kind == "stat":
        options = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
        builder = stat.Panel().reduce_options(options)
        builder.graph_mode(common.BigValueGraphMode.AREA)
    elif panel.kind == "xy":
        builder = against(panel)
    else:
        builder = lines(panel)

    builder.title(panel.title).description(panel.description).unit(panel.unit)
    builder.datasource(SOURCE).min(0)

    if panel.most is not None:
        builder.max(panel.most)
    if panel.lines:
        bounds = zip((None, *panel.lines), COLOURS, strict=False)
        steps = [dashboard.Threshold(value=bound, color=colour) for bound, colour in bounds]
        thresholds = builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE)
        builder.thresholds(thresholds.steps(steps))

    for ref_id, query in zip(REF_IDS, panel.queries, strict=False):
        builder.with_target(target(ref_id, query))
    return builder


def target(ref_id: str, query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery().ref_id(ref_id).expr(query.text).legend_format(query.legend).range()
    )


def lines(panel: Panel) -> timeseries.Panel:
    """Return a time series panel, stacked if its parts add up to a whole."""
    legend = common_builders.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST)
    legend.placement(common.LegendPlacement.BOTTOM).show_legend(True).calcs([])
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    builder = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1)
    if panel.kind == "stack":
        builder.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
        builder.fill_opacity(30)
    if panel.lines:
        style = common_builders.GraphThresholdsStyleConfig()
        builder.thresholds_style(style.mode(common.GraphTresholdsStyleMode.DASHED))
    return builder


def against(panel: Panel) -> xychart.Panel:
    """Return a panel with a scatter plot of the second query against the first."""
    of_x, of_y = (query.legend for query in panel.queries)
    series = xychart.ScatterSeriesConfig().x(of_x).y(of_y).show(ScatterShow.POINTS)
    joined = dashboard.DataTransformerConfig("joinByField", options={"byField": "Time"})
    builder = xychart.Panel().series_mapping(SeriesMapping.MANUAL).series([series])
    return builder.with_transformation(joined)
